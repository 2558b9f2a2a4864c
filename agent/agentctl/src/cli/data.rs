//! The arguments of `data`.

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub(crate) enum DataVerb {
    /// Give a name to a file, a directory or an address; a job reads it as `azureml:NAME:VERSION` or
    /// `azureml:NAME@LABEL`.
    #[command(after_help = "Examples:\n  \
                            agentctl data create iris data/iris.csv --label checked\n  \
                            agentctl data create images s3://bucket/images --type uri_folder --visibility all")]
    Create(DataCreateArgs),
    /// List them, newest first.
    List {
        /// Also those that are archived.
        #[arg(long)]
        all: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show every version of one.
    Show {
        /// Its name.
        name: String,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Take it out of the list, and out of what `@latest` means; jobs that name a version still get it.
    Archive(DataVersionArgs),
    /// Put it back into the list.
    Restore(DataVersionArgs),
    /// Remove it: its name means nothing any more, and nothing keeps its files in the store.
    Rm(DataVersionArgs),
}

#[derive(Debug, Args)]
pub(crate) struct DataCreateArgs {
    /// Its name.
    pub(crate) name: String,
    /// A file or a directory, which is sent; or an address that nodes fetch.
    pub(crate) path: String,
    /// Its version; otherwise the next number.
    #[arg(long)]
    pub(crate) version: Option<String>,
    /// A label that means this version from now on; may be repeated.
    #[arg(long, value_name = "LABEL")]
    pub(crate) label: Vec<String>,
    /// Free text.
    #[arg(long, default_value = "", hide_default_value = true)]
    pub(crate) description: String,
    /// What an address names; otherwise a file if it ends like one.
    #[arg(long = "type", value_parser = ["uri_file", "uri_folder"])]
    pub(crate) kind: Option<String>,
    /// Who may read it.
    #[arg(long, value_parser = ["owner", "all"], default_value = "owner")]
    pub(crate) visibility: String,
    /// As JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DataVersionArgs {
    /// Its name.
    pub(crate) name: String,
    /// Only this version.
    #[arg(long)]
    pub(crate) version: Option<String>,
}
