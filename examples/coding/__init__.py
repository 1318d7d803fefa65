"""An agent that writes programs, tries them, and is judged by tests."""
