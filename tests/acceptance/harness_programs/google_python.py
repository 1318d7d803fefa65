"""Google's SDK for Python: a chat that calls the function by itself."""

import os
import sys

from google import genai
from google.genai import types


def run_command(command: str) -> str:
    """Run a command."""
    return command.removeprefix("echo ")


client = genai.Client(
    api_key=os.environ["OPENAI_API_KEY"],
    http_options=types.HttpOptions(base_url=os.environ["ANTHROPIC_BASE_URL"]),  # no version
)
chat = client.chats.create(model="tiny", config=types.GenerateContentConfig(tools=[run_command]))
print(chat.send_message(sys.argv[1]).text)
