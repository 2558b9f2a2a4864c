//! A service manager as a daemon sees it: the socket that it tells of its life.

use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use crate::fleet::Daemon;

/// A service manager that listens.
#[derive(Debug)]
pub struct ServiceManager {
    socket: UnixDatagram,
}

impl ServiceManager {
    /// That of a daemon, from its next start on, with a watchdog that wants to be fed every two seconds.
    pub fn of(daemon: &mut Daemon) -> ServiceManager {
        let path = daemon.state().with_file_name("notify");
        let socket = UnixDatagram::bind(&path).expect("a socket");
        socket.set_nonblocking(true).expect("a socket");
        daemon.set("NOTIFY_SOCKET", &path.display().to_string());
        daemon.set("WATCHDOG_USEC", "2000000");
        ServiceManager { socket }
    }

    /// The messages since it was last asked.
    pub fn heard(&self) -> Vec<String> {
        let mut buffer = [0; 4096];
        let next = || {
            self.socket
                .recv(&mut buffer)
                .ok()
                .map(|count| String::from_utf8_lossy(&buffer[..count]).into_owned())
        };
        std::iter::from_fn(next).collect()
    }

    /// How often the watchdog is fed in this time from now.
    pub fn feeds_within(&self, time: Duration) -> usize {
        self.heard();
        std::thread::sleep(time);
        self.heard().iter().filter(|said| *said == "WATCHDOG=1").count()
    }
}
