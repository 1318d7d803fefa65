"""HTTP messages (some are also file formats), clients and servers of the services; fault points."""
