"""SGLang on machines without a GPU. `sglang_cpu.py` is the server's program."""
