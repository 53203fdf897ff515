"""Plugins that tests run real campaigns with; on the path of every `paceline` that a test starts."""
