//! Whom a request is from.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use tokio::time::Instant;

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Peer {
    /// One IPv4 address, or the /64 of an IPv6 address: whoever has one of those has all of them.
    Network(IpAddr),
    /// A Unix socket.
    Local,
}

impl From<IpAddr> for Peer {
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) & !u128::from(u64::MAX);
                Self::Network(Ipv6Addr::from(network).into())
            }
            v4 => Self::Network(v4),
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Network(IpAddr::V6(network)) => write!(f, "{network}/64"),
            Self::Network(address) => address.fmt(f),
            Self::Local => f.write_str("unix"),
        }
    }
}

/// Whose limits and turns a request counts for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Client {
    /// Who has this name's API key.
    Key(Arc<str>),
    Peer(Peer),
    /// The server itself, for a probe.
    Server,
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(name) => f.write_str(name),
            Self::Peer(peer) => peer.fmt(f),
            Self::Server => f.write_str("server"),
        }
    }
}

/// Who waits for an answer, and since when.
#[derive(Clone, Debug)]
pub struct Caller {
    pub client: Client,
    pub arrived: Instant,
}

tokio::task_local! {
    /// Set while a request is handled.
    pub static CALLER: Caller;
}

/// The caller of the request at hand; without a connection, as in tests, a local one that comes now.
pub fn caller() -> Caller {
    let none = || Caller { client: Client::Peer(Peer::Local), arrived: Instant::now() };
    CALLER.try_with(Clone::clone).unwrap_or_else(|_| none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_peer_for_a_network() {
        let peer = |text: &str| Peer::from(text.parse::<IpAddr>().unwrap());
        assert_eq!(peer("2001:db8::1"), peer("2001:db8::ffff:1"));
        assert_ne!(peer("2001:db8::1"), peer("2001:db8:0:1::1"));
        assert_eq!(peer("::ffff:10.0.0.1"), peer("10.0.0.1"));
        assert_ne!(peer("10.0.0.1"), peer("10.0.0.2"));
        assert_eq!(peer("2001:db8::1").to_string(), "2001:db8::/64");
    }
}
