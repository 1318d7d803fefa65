"""instructor over OpenAI's Responses: an answer of a given form, asked for until it has that."""

import sys

import instructor
from instructor import Mode
from pydantic import BaseModel, field_validator


class Count(BaseModel):
    times: int

    @field_validator("times")
    @classmethod
    def _is_enough(cls, times: int) -> int:
        if times < 3:
            raise ValueError("seventeen is said thrice")
        return times


client = instructor.from_provider("openai/tiny", mode=Mode.RESPONSES_TOOLS)
messages = [{"role": "user", "content": sys.argv[1]}]
count = client.create(response_model=Count, messages=messages, max_retries=3)
print("DONE" if count.times == 3 else count)
