"""Every use of a part of torch that is not public, in one place, each with its reason and the public way that falls short."""
