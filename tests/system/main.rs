//! The whole engine on the demo models: recorded traces, and what must not change them.

mod demo;
mod load;
mod traces;
