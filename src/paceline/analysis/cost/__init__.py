"""What training and inference cost, and what published tables claim about it. Start with `training`."""
