"""Predict step time, memory and cost before anything runs: physics, a few fitted parameters, and measured anchors.

Pure NumPy, without torch. `setup` says what is predicted, `hardware` on what, `step_time` adds up where the time goes,
`offsets` turns measurements into a posterior and an interval. `parameters.toml` holds the fit of
`benchmarks/fit_prediction.py`. Start with `predict`.
"""
