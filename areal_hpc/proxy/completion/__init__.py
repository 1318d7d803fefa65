"""Path of one model call: prompt, generation, recorded reply. Begin with `service.py`."""
