"""The parts of `config_loader`: what keys exist, where values come from, how other projects spell them, how they are shown."""
