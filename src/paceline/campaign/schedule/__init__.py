"""Schedules: cron expressions, the list of scheduled experiments, notifications, and the timers that start them.

Start with `agenda`. `timers` holds one module per system that can start a run (crontab, systemd, Kubernetes CronJob).
"""
