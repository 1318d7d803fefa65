"""Verifiers of answers, as reward functions of AReaL's signature.

Each is `(prompt, completions, prompt_ids, completion_ids, **task) -> float`. It reads only
`completions`, the reply as text, and the keys of the task set's row that it names as parameters.
They block, and some run long: call them through `AsyncRewardWrapper`, which gives each call a
process and a time limit. Mathematics and programs have limits of their own as well.
"""
