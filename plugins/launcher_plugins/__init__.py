"""The strategies that ship with Trireme, through the door that any other plugin uses."""
