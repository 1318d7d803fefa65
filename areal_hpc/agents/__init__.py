"""Ready-to-use agents, as `rollout.workflow` names them: SDKs, gyms, coding harnesses."""
