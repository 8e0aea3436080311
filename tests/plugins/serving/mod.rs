//! What plugins do to a server that is at work: it lives on, and other routes give the text that they gave.

mod broken;
mod disabled;
mod hanging;
mod overrides;
mod server;
