"""Where the time of a run went: timeline, trace for Perfetto, idle nodes."""
