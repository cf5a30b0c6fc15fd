"""Matrices split over the ranks of a group, as in Megatron-LM."""
