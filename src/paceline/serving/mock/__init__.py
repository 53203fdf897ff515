"""mock."""
