//! A connection of a session to a port of the job's loopback.

use std::io::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use agent_shim::session::{FromJob, FromUser};

use super::SessionLink;

/// How long connecting may take.
const CONNECT: Duration = Duration::from_secs(5);

/// Carries data between the port and the other side until either closes.
pub(super) fn run(link: &SessionLink, port: u16) {
    let stream = match connect(port) {
        Ok(stream) => stream,
        Err(error) => {
            return link
                .refuse(format!("nothing in the job takes connections at port {port}: {error}"), None);
        }
    };
    let _ = link.send(&FromJob::Ready); // the first read finds out that the other side is gone
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = feed(link, &stream); // either way this direction is over
            let _ = stream.shutdown(Shutdown::Both);
        });
        link.relay(&stream, false);
        let _ = link.send(&FromJob::End(0));
        let _ = link.stream.shutdown(Shutdown::Both);
        let _ = stream.shutdown(Shutdown::Both);
    });
}

fn connect(port: u16) -> io::Result<TcpStream> {
    let to = |address: IpAddr| TcpStream::connect_timeout(&SocketAddr::new(address, port), CONNECT);
    let stream =
        to(Ipv4Addr::LOCALHOST.into()).or_else(|error| to(Ipv6Addr::LOCALHOST.into()).map_err(|_| error))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Until the other side is gone.
fn feed(link: &SessionLink, mut stream: &TcpStream) -> io::Result<()> {
    while let Some(frame) = link.next()? {
        match frame {
            FromUser::Data(data) => stream.write_all(&data)?,
            FromUser::EndOfData => stream.shutdown(Shutdown::Write)?,
            FromUser::Open(_) | FromUser::Size(_) | FromUser::Signal(_) => {}
        }
    }
    Ok(())
}
