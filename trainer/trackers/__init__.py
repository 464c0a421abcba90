"""Where the numbers of a run go: one small file for each service, imported only where `trainer.logger` asks for it."""
