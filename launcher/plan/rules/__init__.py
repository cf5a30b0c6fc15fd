"""What cannot be trained, and ways out that hold. No prediction of its own."""
