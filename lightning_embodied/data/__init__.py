"""Robot demonstrations as samples: LeRobot datasets, statistics, sample order, DataModules."""
