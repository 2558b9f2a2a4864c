//! The arguments of the commands that reach into a job that runs.

use clap::{Args, Subcommand};

/// These commands.
#[derive(Debug, Subcommand)]
pub(crate) enum InsideVerb {
    /// Run a command in a job that runs, with its environment, files and limits; the exit code is the command's.
    #[command(
        after_help = "At a terminal the command has one, too; otherwise standard input, output and error are \
                            passed on. The command ends with the job, and with this connection.\n\n\
                            Examples:\n  \
                            agentctl exec train-a -- bash\n  \
                            agentctl exec train-a -- python -m pip list"
    )]
    Exec(ExecArgs),
    /// Reach ports of a job that runs at this machine's loopback, until Ctrl-C or the end of the job.
    #[command(after_help = "Example:\n  agentctl forward train-a 6006 8888:9999")]
    Forward(ForwardArgs),
    /// Open a service of a job that runs: print its address at this machine's loopback, until Ctrl-C or the job's end.
    #[command(after_help = "Example:\n  agentctl open train-a tensorboard")]
    Open(OpenArgs),
}

/// `exec`.
#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// The job's name, or the beginning of it; `-` is your last one.
    pub(crate) job: String,
    /// The rank of the job, of several.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) rank: u32,
    /// No terminal for the command, although this is one.
    #[arg(long, short = 'T')]
    pub(crate) no_terminal: bool,
    /// The program and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

/// `forward`.
#[derive(Debug, Args)]
pub(crate) struct ForwardArgs {
    /// The job's name, or the beginning of it; `-` is your last one.
    pub(crate) job: String,
    /// A port of the job, and the port here if it is to be another one; 0 is any free one.
    #[arg(required = true, value_name = "PORT[:LOCAL]", value_parser = ports)]
    pub(crate) ports: Vec<Ports>,
    /// The rank of the job, of several.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub(crate) rank: u32,
}

/// `open`.
#[derive(Debug, Args)]
pub(crate) struct OpenArgs {
    /// The job's name, or the beginning of it; `-` is your last one.
    pub(crate) job: String,
    /// A service of the job file; or tensorboard or jupyter_lab, from the job's environment.
    pub(crate) service: String,
    /// The port here; otherwise any free one.
    #[arg(long, default_value_t = 0, value_name = "PORT", hide_default_value = true)]
    pub(crate) port: u16,
}

/// A port of a job, and where it is reached here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ports {
    pub(crate) remote: u16,
    pub(crate) local: u16,
}

fn ports(text: &str) -> Result<Ports, &'static str> {
    let wrong = "write it as 6006 or 6006:8080; a port is a number from 1 to 65535";
    let port = |text: &str| text.parse::<u16>().map_err(|_| wrong);
    let (remote, local) = text.split_once(':').unwrap_or((text, text));
    let ports = Ports { remote: port(remote)?, local: port(local)? };
    if ports.remote == 0 { Err(wrong) } else { Ok(ports) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_ports_are_read_as_they_are_written() {
        assert_eq!(ports("6006"), Ok(Ports { remote: 6006, local: 6006 }));
        assert_eq!(ports("6006:0"), Ok(Ports { remote: 6006, local: 0 }));
        for text in ["", "0", "0:1", "65536", "1:2:3", "http", "1:"] {
            assert!(ports(text).is_err(), "{text}");
        }
    }
}
