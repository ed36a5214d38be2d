//! Placeholder, replaced in the first commits.
