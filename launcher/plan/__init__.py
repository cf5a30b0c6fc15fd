"""From a configuration to a plan: checked, laid out, predicted. Pure: reads no file, starts no process."""
