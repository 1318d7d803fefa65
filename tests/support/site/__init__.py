"""The site's pages: those of docs/ with the tables that code and results fill in."""
