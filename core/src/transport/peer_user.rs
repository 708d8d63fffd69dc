//! The user of a program at the other end of a TCP connection within this host, from the kernel's table of sockets.
//!
//! Thread rule: any thread.

use std::fs;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};

/// The tables of this network namespace (proc_net(5)).
const TABLES: [&str; 2] = ["/proc/self/net/tcp", "/proc/self/net/tcp6"];

/// The user of the program at the other end of `stream`, if that is on this host and still there.
///
/// # Errors
/// [`ErrorKind::PermissionDenied`] if the kernel does not tell; other system errors.
pub fn peer_user(stream: &TcpStream) -> io::Result<Option<u32>> {
    let [here, there] = [stream.local_addr()?, stream.peer_addr()?].map(plain);
    first_user(|table| find(table, there, here))
}

/// As [`peer_user`], for the end that has called connect. A socket that its program has not accepted yet belongs to user
/// 0 for kernels before 6.16, so this is the user of the socket that listens there.
///
/// # Errors
/// As there.
pub fn listener_user(stream: &TcpStream) -> io::Result<Option<u32>> {
    let there = plain(stream.peer_addr()?);
    first_user(|table| find_listener(table, there))
}

/// The first user that `find` finds in the tables.
fn first_user(find: impl Fn(&str) -> Option<u32>) -> io::Result<Option<u32>> {
    // A host may have no IPv6.
    let tables: Vec<String> = TABLES.into_iter().filter_map(|table| fs::read_to_string(table).ok()).collect();
    if tables.is_empty() {
        return Err(io::Error::new(ErrorKind::PermissionDenied, format!("{} cannot be read", TABLES[0])));
    }
    Ok(tables.iter().find_map(|table| find(table)))
}

/// This process's user.
pub fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Without a mapping of IPv4 into IPv6, scope or flow.
fn plain(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// The user of the socket at `local` that is connected with `remote`.
fn find(table: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    // A socket that is closed has no user any more.
    rows(table).find(|row| row.local == local && row.remote == remote && row.state != TIME_WAIT).map(|row| row.user)
}

/// The user of the socket that accepts connections to `local`.
fn find_listener(table: &str, local: SocketAddr) -> Option<u32> {
    let accepts = |at: &SocketAddr| at.port() == local.port() && (at.ip() == local.ip() || at.ip().is_unspecified());
    rows(table).find(|row| row.state == LISTEN && accepts(&row.local)).map(|row| row.user)
}

/// A socket of the table.
struct Row {
    local: SocketAddr,
    remote: SocketAddr,
    state: u8,
    user: u32,
}

/// The sockets of a table. Its lines have a number, both addresses, a state, two columns of queues and timers,
/// retransmissions, and the user.
fn rows(table: &str) -> impl Iterator<Item = Row> {
    table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        Some(Row {
            local: address(fields.get(1)?)?,
            remote: address(fields.get(2)?)?,
            state: u8::from_str_radix(fields.get(3)?, 16).ok()?,
            user: fields.get(7)?.parse().ok()?,
        })
    })
}

const TIME_WAIT: u8 = 6;
const LISTEN: u8 = 10;

/// An address of the table: words of the host's byte order in hexadecimal, a colon and the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let words: Vec<u32> = (0..address.len() / 8)
        .map(|word| u32::from_str_radix(address.get(8 * word..8 * word + 8)?, 16).ok())
        .collect::<Option<_>>()?;
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let ip = match bytes.len() {
        4 => IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        16 => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)),
        _ => return None,
    };
    Some(plain(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?)))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn both_ends_have_this_user() {
        for address in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            // A host may have no IPv6.
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let port = listener.local_addr().unwrap().port();
            let target =
                if address.starts_with("[::1]") { format!("[::1]:{port}") } else { format!("127.0.0.1:{port}") };
            let client = TcpStream::connect(target).unwrap();
            assert_eq!(listener_user(&client).unwrap(), Some(own_user()), "{address}, before it is accepted");
            let (served, _) = listener.accept().unwrap();
            assert_eq!(peer_user(&client).unwrap(), Some(own_user()), "{address}");
            assert_eq!(peer_user(&served).unwrap(), Some(own_user()), "{address}");
        }
    }

    #[test]
    fn other_lines_are_skipped() {
        let row = |local: &str, state: &str, user: u32| {
            format!("   0: {local} 0100007F:1F91 {state} 00000000:00000000 00:00000000 00000000  {user}  0 1 1 0 20\n")
        };
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n";
        let here = |port: u16| SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port);
        let table = format!(
            "{head}{}{}{}x\n",
            row("0100007F:1F8F", "01", 5),
            row("0100007F:1F90", "06", 0),
            row("0100007F:1F90", "01", 7)
        );
        if cfg!(target_endian = "little") {
            assert_eq!(find(&table, here(8080), here(8081)), Some(7));
            assert_eq!(find(&table, here(8079), here(8081)), Some(5));
        }
        assert_eq!(find(&table, here(8082), here(8081)), None);
        let listening = format!("{head}{}{}", row("0100007F:1F90", "01", 0), row("00000000:1F90", "0A", 8));
        assert_eq!(find_listener(&listening, here(8080)), Some(8));
        assert_eq!(find_listener(&table, here(8080)), None);
    }
}
