"""Pipeline schedules as data: actions, the passes over them, simulation, drawing."""
