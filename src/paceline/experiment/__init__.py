"""YAML to run specs. The only user of pydantic."""

from paceline.experiment.expansion import counted, expand, load, order, parse_setting, select
from paceline.experiment.fields import Cell, Experiment, build
from paceline.experiment.reading import presets

__all__ = ["Cell", "Experiment", "build", "counted", "expand", "load", "order", "parse_setting", "presets", "select"]
