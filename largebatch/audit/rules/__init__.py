"""Everything that an audit can find: tables of rules, by what was measured."""
