"""What both domains share: optimizer, schedules, data order, callbacks, command line and run folder."""
