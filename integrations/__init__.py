"""Everything that plugs the losses into a trainer; import the module you need."""
