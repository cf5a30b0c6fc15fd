"""What runs on the ranks: with torch, without Hydra, doing what the plan says."""
