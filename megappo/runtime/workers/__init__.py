"""Helper processes of a rank that run code of the user, several at once, with a limit of time: for rewards and environments."""
