"""Charts as PNG and SVG files, drawn by matplotlib."""
