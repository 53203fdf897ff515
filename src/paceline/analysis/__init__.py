"""From records to findings: pure functions, no files, no torch.

Each module imports only those before it: statistics < gauges < energy < window < metrics < observation < certificate <
compare < scaling < recommend < report.
"""
