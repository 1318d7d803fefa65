"""Verifiers of answers, as reward functions of AReaL's signature.

Each is `(prompt, completions, prompt_ids, completion_ids, **task) -> float`, given what the model
said and the row of the task set; of those it looks at `completions`, the reply as text, and at the
keys of the task that it names. They block, and some run long: call them through
`AsyncRewardWrapper`, which gives each a process and a time limit. Mathematics and programs have
limits of their own as well.
"""
