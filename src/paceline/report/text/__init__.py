"""Names and numbers as people read them: cells, loads, machines, measurements, the trust light.

The lowest part of `report`: tables, charts and sentences build on it, so that a thing has one name everywhere. Start
with `cells`.
"""
