"""Start, supervision and end of a task's processes: fork server, signals, orphans."""
