"""Starting, supervising and ending the processes of one task: the fork server, signals, orphans."""
