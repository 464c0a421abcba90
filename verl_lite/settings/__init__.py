"""The parts of `config_loader`: the keys, where values come from, how other projects spell them, how all is shown."""
