"""jengine in other projects. Each folder has an extra of its name, and imports what that installs."""
