"""Names and numbers as people read them: cells, loads, machines, measurements.

The lowest part of `report`: tables and charts build on it.
"""
