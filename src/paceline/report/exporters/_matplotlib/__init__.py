"""_matplotlib."""
