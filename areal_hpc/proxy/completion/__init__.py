"""One model call: prompt, generation, recorded reply."""
