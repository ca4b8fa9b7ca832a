"""The processes of a session's actors, from birth to burial."""
