"""Schedules: cron expressions, the list of scheduled experiments, notifications, and the timers that start them.

`timers` has one module per system that can start a run: crontab, systemd, Kubernetes CronJob. What a scheduled run does
is in `campaign.scheduled_run`. Start with `agenda`.
"""
