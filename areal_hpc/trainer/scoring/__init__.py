"""Networks beside the policy: frozen ones that score its tokens, and the critic."""
