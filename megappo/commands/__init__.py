"""The commands of `megappo`: the arguments of each beside what it runs, imported only when it is chosen."""
