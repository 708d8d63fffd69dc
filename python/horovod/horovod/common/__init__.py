"""What the bindings share: the job, process sets, calls and their names, errors, the timeline."""
