//! Users and groups of the machine, as the system knows them: its own files, and a directory service where there is
//! one.

use std::ffi::CString;

use agent_model::protocol::record::JobUser;
use nix::unistd::{self, Gid, Uid};

/// The user of this id, as the system knows it now; may block on the lookup.
pub(crate) fn user_of(uid: u32) -> Option<JobUser> {
    known(unistd::User::from_uid(Uid::from_raw(uid)).ok()??)
}

/// Whether the system knows a user of this name; may block on the lookup. Taken for one where it cannot tell.
pub(crate) fn is_user(name: &str) -> bool {
    !matches!(unistd::User::from_name(name), Ok(None))
}

fn known(user: unistd::User) -> Option<JobUser> {
    let home = user.dir.to_str()?.to_owned();
    let name = CString::new(user.name.clone()).ok()?;
    let groups = unistd::getgrouplist(&name, user.gid).unwrap_or_default();
    let groups = groups.into_iter().map(Gid::as_raw).filter(|group| *group != user.gid.as_raw()).collect();
    Some(JobUser { name: user.name, uid: user.uid.as_raw(), gid: user.gid.as_raw(), groups, home })
}

/// None for an empty text, otherwise the user of that name.
pub(super) fn job_user(text: &str) -> Option<Option<JobUser>> {
    if text.is_empty() {
        return Some(None);
    }
    known(unistd::User::from_name(text).ok()??).map(Some)
}

/// A group of users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Group(Gid);

impl Group {
    pub(crate) fn id(self) -> u32 {
        self.0.as_raw()
    }

    /// Whether a user belongs to it. Asks the system each time, because members change, and may block on the lookup.
    pub(crate) fn has(self, uid: u32) -> bool {
        let Ok(Some(user)) = unistd::User::from_uid(Uid::from_raw(uid)) else { return false };
        let Ok(name) = CString::new(user.name) else { return false };
        unistd::getgrouplist(&name, user.gid).is_ok_and(|groups| groups.contains(&self.0))
    }
}

/// None for an empty text, otherwise the group of that name.
pub(super) fn group(text: &str) -> Option<Option<Group>> {
    if text.is_empty() {
        return Some(None);
    }
    Some(Some(Group(unistd::Group::from_name(text).ok()??.gid)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_users_and_groups_are_those_of_the_system() {
        let root = job_user("root").unwrap().unwrap();
        assert_eq!((root.uid, root.gid, root.home.as_str()), (0, 0, "/root"));
        assert_eq!((user_of(0), user_of(4_000_000_000)), (Some(root), None));
        assert_eq!((job_user(""), job_user("no-such-user")), (Some(None), None));
        let wheel = group("root").unwrap().unwrap();
        assert_eq!((wheel.id(), wheel.has(0), wheel.has(65534)), (0, true, false));
        assert_eq!((group(""), group("no-such-group")), (Some(None), None));
        assert!(!wheel.has(4_000_000_000), "nobody of that number");
    }
}
