"""Sweeps: specification (`study_spec`), checks (`sweep_checks`), results (`study`) and execution (`tuning`,
`trial_process`)."""
